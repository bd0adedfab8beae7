from django.db import migrations, models


def part(apps, schema_editor):
    """A cluster with several lanes keeps the oldest; each later one moves to a cluster made for it, without replicas."""
    Cluster = apps.get_model("controlplane", "Cluster")
    Lane = apps.get_model("controlplane", "Lane")
    served = set()
    for lane in Lane.objects.select_related("cluster").order_by("created_at", "pk"):
        if lane.cluster_id not in served:
            served.add(lane.cluster_id)
            continue
        old = lane.cluster
        lane.cluster = Cluster.objects.create(
            project_id=old.project_id,
            slug=_free_slug(Cluster.objects.filter(project=old.project_id), f"{old.slug}-{lane.slug}"),
            role="serving",
            region=old.region,
            capacity=old.capacity,
            model_id=old.model_id,
        )
        lane.save(update_fields=["cluster"])
    schema_editor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # a table with checks pending cannot be altered


def _free_slug(clusters, wished):
    taken = set(clusters.values_list("slug", flat=True))
    slug, number = wished[:64], 1
    while slug in taken:
        number += 1
        slug = f"{wished[:58]}-{number}"
    return slug


class Migration(migrations.Migration):
    dependencies = [
        ("controlplane", "0021_exports"),
    ]

    operations = [
        migrations.RunPython(part, migrations.RunPython.noop),
        migrations.AddConstraint(
            model_name="lane",
            constraint=models.UniqueConstraint(fields=("cluster",), name="one_lane_of_a_cluster"),
        ),
    ]
