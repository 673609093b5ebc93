"""``python -m trivet``."""

from trivet.cli import main

if __name__ == "__main__":
    main()
