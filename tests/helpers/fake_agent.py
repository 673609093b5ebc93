"""The real agent of a host, as its settings say, with the tests' supervisors."""

import logging
import sys
from pathlib import Path

from service.jobs.settings import Settings
from workers.agent.agent import Agent, AgentSettings

if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    Agent(Settings(), AgentSettings(), (sys.executable, str(Path(__file__).with_name("fake_supervisor.py")))).run()
