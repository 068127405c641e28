"""Who is tried, with what said to them, and what is to become of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import attrs

from tests.agents.policy import Say, call, messages, turns

CLIENTS = "{clients}"  # the folder of the programs

ADD_BOTH = call("add", '{"a": 2, "b": 3}') + "\n" + call("add", '{"a": 10, "b": 20}')
ADD_LAST = "And both.\n" + call("add", '{"a": 5, "b": 30}')
SUM = turns(ADD_BOTH, ADD_LAST, "It is 35.")
THOUGHTS = turns(
    *(f"<think>\nHm, {i}.\n</think>\n\n{text}" for i, text in enumerate((ADD_BOTH, ADD_LAST, "It is 35.")))
)


@attrs.frozen
class Case:
    """One agent on one session.

    Attributes:
        name: of the client, and the way it is used.
        environment: where it is installed.
        command: what is run; ``{url}``, ``{root}``, ``{key}``, ``{model}``, ``{clients}`` and ``{work}`` are filled in.
        say: what the policy says.
        result: what is in the output at the end.
        turns: that are sampled.
        branches: of them; more than one where the client begins anew, or changes what was said.
        rewritten: requests whose turns of the policy are not as they were sampled.
        variables: of the environment, beside the session's.
        files: path -> text, in the folder in which it runs.
        wanted: path -> text that is to be in a file at the end.
    """

    name: str
    environment: str
    command: Sequence[str]
    say: Say
    result: str = "35"
    turns: int = 3
    branches: int = 1
    rewritten: int = 0
    variables: Mapping[str, str] = attrs.field(factory=dict)
    files: Mapping[str, str] = attrs.field(factory=dict)
    wanted: Mapping[str, str] = attrs.field(factory=dict)


def program(name: str, environment: str, file: str, way: str, say: Say = SUM, *, more: str = "", **fields) -> Case:
    """Return a case of a program here; ``more`` is put behind its name."""
    return Case(f"{name}/{way}{more}", environment, ["python", f"{CLIENTS}/{file}.py", way], say, **fields)


def team(prompt: str) -> str:
    """Lead a helper and hand over to a writer; each has its own instructions."""
    said = messages(prompt)
    system, done = said[0][1], sum(role == "assistant" for role, _ in said)
    if "You help" in system:
        return [ADD_BOTH, "35"][min(done, 1)]
    if "You lead" in system:
        return [call("ask_helper", '{"input": "2 + 3 + 10 + 20"}'), call("transfer_to_writer", "{}")][min(done, 1)]
    return "It is 35."


CODE = turns(
    "Thought: I add.\n<code>\nx = add(2, 3)\ny = add(10, 20)\nprint(x, y)\n</code>",
    "Thought: both.\n<code>\nprint(add(x, y))\n</code>",
    "Thought: done.\n<code>\nfinal_answer(x + y)\n</code>",
)
CALLS = turns(ADD_BOTH, ADD_LAST, call("final_answer", '{"answer": "It is 35."}'))

SHELL = turns(
    "Look.\n" + call("bash", '{"command": "ls; echo \\"a  b\\""}'),
    call("bash", '{"command": "echo 35 > sum.txt"}') + call("bash", '{"command": "cat sum.txt"}'),
    call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat sum.txt"}'),
)


def slow_start(prompt: str) -> str:
    """Make no call until the harness complains."""
    return SHELL(prompt) if "Tool call error" in prompt else "I think."


BLOCKS = turns(
    "THOUGHT: look\n\n```mswea_bash_command\nls\n```",
    "THOUGHT: write\n\n```mswea_bash_command\necho 35 > sum.txt\n```",
    "THOUGHT: done\n\n```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat sum.txt\n```",
)
MINI = ["mini", "--yolo", "--exit-immediately", "-m", "openai/{model}", "-t", "Write the sum of 2, 3, 10 and 20."]
MINI_VARIABLES = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}


def mini(way: str, *options: str, say: Say = SHELL, **fields) -> Case:
    """Return a case of mini-swe-agent's own command."""
    command = [*MINI, "-o", "{work}/episode.json", *options]
    wanted = {"sum.txt": "35"}
    return Case(
        f"mini-swe-agent/{way}", "mini-swe-agent", command, say, "", variables=MINI_VARIABLES, wanted=wanted, **fields
    )


def coder(shell: Callable[[str], str], ask: str, arguments: Mapping[str, str]) -> Say:
    """Look around with two calls at once, have a helper do the work, and say that it is done."""
    task = call(ask, json.dumps({"description": "write", "prompt": "HELP: write 35 into sum.txt", **arguments}))

    def say(prompt: str) -> str:
        said = messages(prompt)
        users, done = " ".join(text for role, text in said if role == "user"), sum(r == "assistant" for r, _ in said)
        if "title" in said[0][1][:80]:
            return "The sum"
        if "HELP" in users:
            return [shell("echo 35 > sum.txt"), "35 is written."][min(done, 1)]
        return [f"Look.\n{shell('ls -a')}\n{shell('pwd')}", task, "It is 35."][min(done, 2)]

    return say


def command(tool: str, name: str = "command", **more: str) -> Callable[[str], str]:
    """Return what makes a call of a shell."""
    return lambda line: call(tool, json.dumps({name: line, **more}))


TASK = "Write the sum of 2, 3, 10 and 20 into sum.txt."
OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "rlkit": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}", "apiKey": "{key}"},
            "models": {"{model}": {"limit": {"context": 200000, "output": 8192}}},
        }
    },
    "model": "rlkit/{model}",
    "small_model": "rlkit/{model}",
}
CODEX = 'model_providers.rlkit={name="rlkit", base_url="{url}", env_key="OPENAI_API_KEY", wire_api="responses"}'
CODEX_OPTIONS = ['model_provider="rlkit"', CODEX, "features.multi_agent=false", 'web_search="disabled"']
NODE_CASES = [
    Case(
        "opencode/run",
        "opencode",
        ["opencode", "run", "--model", "rlkit/{model}", TASK],
        coder(command("bash", description="d"), "task", {"subagent_type": "general"}),
        turns=6,
        branches=3,
        files={"opencode.json": json.dumps(OPENCODE)},
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        wanted={"sum.txt": "35"},
    ),
    Case(
        "codex/exec",
        "codex",
        [
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "{model}"),
            *(part for option in CODEX_OPTIONS for part in ("-c", option)),
            TASK,
        ],
        turns(
            "Look.\n" + command("exec_command", "cmd")("ls -a") + command("exec_command", "cmd")("pwd"),
            command("exec_command", "cmd")("echo 35 > sum.txt"),
            "It is 35.",
        ),
        wanted={"sum.txt": "35"},
    ),
    Case(
        "claude-code/print",
        "claude-code",
        ["claude", "-p", TASK, "--model", "{model}", "--dangerously-skip-permissions"],
        coder(command("Bash"), "Agent", {"subagent_type": "general-purpose"}),
        turns=5,
        branches=2,
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"},
        wanted={"sum.txt": "35"},
    ),
]
SDK, OTHER = "openai-sdk", "anthropic-sdk"
CASES = [
    *(program(SDK, "sdk", "openai_sdk", way) for way in ("sync", "asynchronous", "stream", "responses", "continued")),
    program(SDK, "sdk", "openai_sdk", "several", turns(ADD_BOTH, "It is 35."), turns=5, branches=4),
    # The text goes on without the end token that was sampled.
    program(SDK, "sdk", "openai_sdk", "text", turns(" 4, 35"), turns=2, branches=2),
    *(program(OTHER, "sdk", "anthropic_sdk", way) for way in ("sync", "asynchronous", "runner")),
    *(
        program("openai-agents", "openai-agents", "openai_agents", way)
        for way in ("chat", "responses", "chat-stream", "responses-stream")
    ),
    *(
        program(name, environment, file, way, THOUGHTS, more="-thinking")
        for name, environment, file, way in (
            (SDK, "sdk", "openai_sdk", "stream"),
            (SDK, "sdk", "openai_sdk", "responses"),
            (OTHER, "sdk", "anthropic_sdk", "asynchronous"),
            ("openai-agents", "openai-agents", "openai_agents", "chat-stream"),
            ("openai-agents", "openai-agents", "openai_agents", "responses-stream"),
            ("langgraph", "langgraph", "langgraph_agent", "chat-stream"),
            ("langgraph", "langgraph", "langgraph_agent", "responses"),
        )
    ),
    *(
        program("openai-agents", "openai-agents", "openai_agents", way, team, turns=5, branches=3, rewritten=1)
        for way in ("chat-team", "responses-team")
    ),
    program("smolagents", "smolagents", "smolagents_agents", "tools", CALLS, branches=3, rewritten=2),
    program("smolagents", "smolagents", "smolagents_agents", "code", CODE),
    program("smolagents", "smolagents", "smolagents_agents", "code-stream", CODE),
    *(
        program("langgraph", "langgraph", "langgraph_agent", way)
        for way in ("chat", "responses", "chat-stream", "responses-stream")
    ),
    mini("tools"),
    mini("no-call", say=slow_start, turns=4, branches=2),
    mini("responses", "--model-class", "litellm_response"),
    mini("text", "-c", "mini_textbased.yaml", "--model-class", "litellm_textbased", say=BLOCKS),
    *NODE_CASES,
]
