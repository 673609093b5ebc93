"""Names of ``service.jobs.spec.common`` where packages have found them: theirs is ``service.jobs.plugins``."""

from service.jobs.spec.common import CommonSpec, Dependency, FileId, JobId, ParallelSpec

__all__ = ["CommonSpec", "Dependency", "FileId", "JobId", "ParallelSpec"]
