"""Pipeline parallelism: schedules as data, checked before they run, and one runtime that runs any of them."""
