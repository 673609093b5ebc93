import sys

from workers.agent import main

sys.exit(main())
