import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0019_cluster_devices'),
    ]

    operations = [
        migrations.CreateModel(
            name='Garbage',
            fields=[
                ('key', models.CharField(max_length=900, primary_key=True, serialize=False)),
                ('bytes', models.BigIntegerField()),
                ('reason', models.CharField(max_length=200)),
                ('marked_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                'indexes': [models.Index(fields=['marked_at'], name='garbage_marked_at')],
            },
        ),
        migrations.AlterField(
            model_name='publication',
            name='manifest_key',
            field=models.CharField(blank=True, db_index=True, max_length=300),
        ),
        migrations.AlterField(
            model_name='workunit',
            name='kind',
            field=models.CharField(choices=[('rollout', 'Rollout'), ('score', 'Score'), ('train', 'Train'), ('transfer', 'Transfer'), ('export', 'Export'), ('derive', 'Derive'), ('shadow', 'Shadow'), ('notify', 'Notify'), ('prove', 'Prove')], max_length=12),
        ),
    ]
