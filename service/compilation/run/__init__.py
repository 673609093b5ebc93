"""Running one rung of the ladder beside the uncompiled reference, comparing the two and timing both."""
