"""Workers that do not compute tensors do not load torch."""

import subprocess
import sys

import pytest
from django.conf import settings

CODE = """
import django
django.setup()
import workers
import sys
sys.exit(any(name.split(".")[0] == "torch" for name in sys.modules))
"""


@pytest.mark.parametrize("module", ["workers", "controlplane.conductor.loop"])
def test_importing_loads_no_torch(module):
    code = CODE.replace("import workers", f"import {module}")
    environment = {
        "PATH": "",
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "SLIPWAY_STATE": str(settings.STATE_DIR),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=settings.BASE_DIR, check=False)
    assert done.returncode == 0
