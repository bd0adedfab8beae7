import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

import controlplane.models.base

# The depth of a version: the steps behind it, over the lineages that its own began from. Then a row for what each
# committed version published; those of a fork's first version are its parent's.
DEPTH = """
WITH RECURSIVE line AS (
    SELECT id, 0 AS depth FROM controlplane_policyversion WHERE parent_id IS NULL
    UNION ALL
    SELECT child.id, line.depth + CASE WHEN child.number = 0 THEN 0 ELSE 1 END
    FROM controlplane_policyversion child JOIN line ON child.parent_id = line.id
)
UPDATE controlplane_policyversion SET depth = line.depth FROM line WHERE line.id = controlplane_policyversion.id
"""
ROWS = """
INSERT INTO controlplane_publication
    (id, created_at, kind, format, root, base_root, manifest_key, bytes, full_bytes, published_at, base_version_id, version_id)
SELECT gen_random_uuid(), now(), CASE WHEN version.parent_id IS NULL THEN 'snapshot' ELSE 'delta' END, 'bf16',
    version.root, coalesce(parent.root, ''), version.manifest_key, version.delta_bytes, version.full_bytes,
    version.committed_at, version.parent_id, version.id
FROM controlplane_policyversion version
LEFT JOIN controlplane_policyversion parent ON parent.id = version.parent_id
WHERE version.state = 'committed' AND (version.parent_id IS NULL OR version.number > 0)
"""


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0016_watched_turns'),
    ]

    operations = [
        migrations.AddField(
            model_name='policyversion',
            name='depth',
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddField(
            model_name='policyversion',
            name='retired_at',
            field=models.DateTimeField(null=True),
        ),
        migrations.CreateModel(
            name='Publication',
            fields=[
                ('id', models.UUIDField(default=controlplane.models.base.new_id, editable=False, primary_key=True, serialize=False)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False)),
                ('kind', models.CharField(choices=[('delta', 'Delta'), ('skip', 'Skip'), ('snapshot', 'Snapshot')], max_length=12)),
                ('format', models.CharField(choices=[('bf16', 'bf16'), ('fp8-channel', 'fp8-channel'), ('fp8-block', 'fp8-block'), ('mxfp4', 'mxfp4'), ('nvfp4', 'nvfp4')], default='bf16', max_length=12)),
                ('root', models.CharField(blank=True, max_length=64)),
                ('base_root', models.CharField(blank=True, max_length=64)),
                ('manifest_key', models.CharField(blank=True, max_length=300)),
                ('bytes', models.BigIntegerField(null=True)),
                ('full_bytes', models.BigIntegerField(null=True)),
                ('published_at', models.DateTimeField(null=True)),
                ('deleted_at', models.DateTimeField(null=True)),
                ('base_version', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='controlplane.policyversion')),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='publications', to='controlplane.policyversion')),
            ],
            options={
                'constraints': [models.UniqueConstraint(condition=models.Q(('deleted_at__isnull', True)), fields=('version', 'format', 'kind', 'base_version'), name='publication_once', nulls_distinct=False), models.CheckConstraint(condition=models.Q(('published_at__isnull', True), models.Q(models.Q(('root', ''), _negated=True), models.Q(('manifest_key', ''), _negated=True)), _connector='OR'), name='published_is_whole')],
            },
        ),
        migrations.RunSQL(DEPTH, migrations.RunSQL.noop),
        migrations.RunSQL(ROWS, migrations.RunSQL.noop),
    ]
