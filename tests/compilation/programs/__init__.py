"""Small programs with one planted defect or peculiarity each; ``clean`` has none."""
