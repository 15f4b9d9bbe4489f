"""Ray's workers are interpreters of the same environment, so they load the patched modules."""

import json

from ..pins import each_pin
from .conftest import Environment
from .test_hook import PATCHED

SCRIPT = f"""
import json, ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

@ray.remote
class Worker:
    def where(self):
        import os, {PATCHED} as m
        return os.getpid(), m.__file__

import os
pid, file = ray.get(Worker.remote().where.remote())
print(json.dumps([pid != os.getpid(), file]))
ray.shutdown()
"""


@each_pin
def test_a_ray_actor_loads_the_patched_file(environment: Environment) -> None:
    environment.pip("install", "ray")
    other, file = json.loads(environment.code(SCRIPT).splitlines()[-1])
    assert other
    assert file.startswith(str(environment.files))
    assert file.endswith("/field_order.py")
