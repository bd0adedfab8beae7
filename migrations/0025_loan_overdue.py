from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0024_enrolments'),
    ]

    operations = [
        migrations.AlterField(
            model_name='alert',
            name='kind',
            field=models.CharField(choices=[('behaviour', 'Behaviour'), ('divergence', 'Divergence'), ('guardrail', 'Guardrail'), ('sample_ratio', 'Sample Ratio'), ('orphans', 'Orphans'), ('cheating', 'Cheating'), ('slot_skipped', 'Slot Skipped'), ('loan_overdue', 'Loan Overdue')], max_length=20),
        ),
        migrations.AlterField(
            model_name='lendingpolicy',
            name='load_at',
            field=models.DateTimeField(help_text='when the source last told it, or was first to be asked', null=True),
        ),
    ]
