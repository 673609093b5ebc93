"""Pipeline schedules as plain data: written, checked and priced without torch, so that a submit can do it too."""
