from django.db import migrations, models
from django.db.models import F


def draw_is_position(apps, schema_editor):
    """Until now no draw came back: each group stood at a place of its own."""
    apps.get_model('controlplane', 'RolloutGroup').objects.update(draw=F('position'))
    apps.get_model('controlplane', 'Stage').objects.update(draws=F('admitted_groups'))


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0012_remote_environments'),
    ]

    operations = [
        migrations.AddField(
            model_name='rolloutgroup',
            name='draw',
            field=models.PositiveIntegerField(default=0, help_text='place in the curriculum; the same again when a lost group comes back'),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name='stage',
            name='draws',
            field=models.PositiveIntegerField(default=0, help_text="cursor into the curriculum's sequence of tasks"),
        ),
        migrations.AlterField(
            model_name='stage',
            name='admitted_groups',
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.RunPython(draw_is_position, migrations.RunPython.noop),
        migrations.AddConstraint(
            model_name='rolloutgroup',
            constraint=models.UniqueConstraint(condition=models.Q(('state__in', ['dropped', 'voided']), _negated=True), fields=('stage', 'draw'), name='draw_counts_once'),
        ),
    ]
