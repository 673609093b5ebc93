"""Runs one function of a test module on a rank: ``rank_main.py MODULE_FILE FUNCTION ARGUMENTS_JSON RESULT_FOLDER``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path


def main(file: str, function: str, arguments: str, folder: str) -> None:
    sys.path.insert(0, str(Path(file).parent))
    specification = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    result = getattr(module, function)(**json.loads(arguments))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads may outlive the group while anyone refers to it, and abort the process when one of them meets an
    # interpreter that is being finalised ("terminate called without an active exception").
    os._exit(0)
