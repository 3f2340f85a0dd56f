"""The API key of a judge with a URL, or of `reward.rm_url`, from an environment variable or a private file."""

import os
from collections.abc import Mapping
from pathlib import Path

from actors.reward.graders.remote import remote_environment
from runtime.settings.tables.reward import JudgeConfig, RewardConfig
from runtime.util.secrets import Secret, read_private


class KeyProblem(ValueError):
    """An API key cannot be read. The text shows none of its content."""

    def __init__(self, setting: str, value: str, reason: str) -> None:
        """Describe the problem of a setting, "api_key_env" or "api_key_file"."""
        super().__init__(reason)
        self.setting = setting
        self.value = value


def api_key(config: JudgeConfig) -> Secret | None:
    """Read the API key of a judge; None if it has none. Raises as `read_key`."""
    return read_key(config.api_key_env, config.api_key_file)


def remote_key(config: RewardConfig) -> Secret | None:
    """Read the API key of `reward.rm_url`; None if it has none. Raises as `read_key`, with its own settings."""
    try:
        return read_key(config.rm_api_key_env, config.rm_api_key_file)
    except KeyProblem as error:
        raise KeyProblem(f"rm_{error.setting}", error.value, str(error)) from error


def remote_variables(config: RewardConfig) -> Mapping[str, str]:
    """Variables that name the server of `remote_rm` and its key to grader processes. Raises as `remote_key`."""
    key = remote_key(config)
    return remote_environment(config.rm_url, None if key is None else key.reveal())


def read_key(name: str | None, path: str | None) -> Secret | None:
    """Read an API key from an environment variable or a private file; None if neither is named.

    Raises:
        KeyProblem: the variable is not set, or the file cannot be read or has no key.
    """
    if name is not None:
        value = os.environ.get(name, "").strip()
        if not value:
            raise KeyProblem("api_key_env", name, "this variable is not set on this node, or empty")
        return Secret(value)
    if path is None:
        return None
    try:
        value = read_private(Path(path)).strip()
    except (OSError, ValueError) as error:
        raise KeyProblem("api_key_file", path, str(error)) from error
    if not value or len(value.split()) > 1:
        raise KeyProblem("api_key_file", path, "expected the key alone in the file")
    return Secret(value)
