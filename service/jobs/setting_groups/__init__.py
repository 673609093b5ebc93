"""Settings by subject: each group is a base class of :class:`service.jobs.settings.Settings`."""
