"""What packages import that bring models, data sources, objectives, optimizers, schedules, programs or kinds of jobs.

These names stay (``docs/use/public.md``). A declaration imports nothing else of Trivet, and no torch.
:mod:`service.jobs.plugins` describes them.
"""

from service.jobs import plugins
from service.jobs.plugins import *  # noqa: F403 - all of that door, and nothing else

__all__: list[str] = []
__all__ += plugins.__all__
