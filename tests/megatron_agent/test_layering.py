"""What import-linter cannot say: submodules of external packages, and what really is loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import megatron_agent

CORE = Path(megatron_agent.__file__).parent


def test_the_core_does_not_touch_process_groups():
    for file in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            assert not any(name.startswith("torch.distributed") for name in names), file


def test_contracts_and_public_names_load_without_torch():
    code = (
        "import sys, megatron_agent, megatron_agent.ports, megatron_agent.settings\n"
        "megatron_agent.Step, megatron_agent.ToolEnv, megatron_agent.AgentFlow, megatron_agent.register_env\n"
        "print(sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
