import sys

from workers.agent.agent import main

sys.exit(main())
