"""What obstore does not look up itself: the AWS profile files. Everything else (AWS_*, GOOGLE_*, AZURE_* variables, the
roles of machines and pods) it finds on its own. Nothing of this is ever taken from a command line."""

from __future__ import annotations

from collections.abc import Mapping
from configparser import ConfigParser, Error
from pathlib import Path

from holdfast.errors import UsageError

KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
VARIABLES = {
    "access_key_id": ("AWS_ACCESS_KEY_ID",),
    "secret_access_key": ("AWS_ACCESS_KEY_ID",),  # a key of the environment goes with a secret of the environment
    "session_token": ("AWS_ACCESS_KEY_ID",),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
}
REGION_DEFAULT = "us-east-1"


def aws_config(environment: Mapping[str, str]) -> dict[str, str]:
    """What the profile files and AWS_ENDPOINT_URL_S3 say, where variables that obstore reads do not say otherwise."""
    profile = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    found: dict[str, str] = {}
    for path, section in (
        (_file(environment, "AWS_CONFIG_FILE", "config"), profile if profile == "default" else f"profile {profile}"),
        (_file(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials"), profile),
    ):
        found |= _section(path, section)
    chosen = {key: value for key, value in found.items() if not any(environment.get(name) for name in VARIABLES[key])}
    if endpoint := environment.get("AWS_ENDPOINT_URL_S3"):
        chosen["endpoint"] = endpoint
    if "region" not in chosen and not any(environment.get(name) for name in VARIABLES["region"]):
        chosen["region"] = REGION_DEFAULT
    return chosen


def _file(environment: Mapping[str, str], variable: str, name: str) -> Path:
    home = environment.get("HOME", "/nonexistent")
    return Path(environment.get(variable) or f"{home}/.aws/{name}").expanduser()


def _section(path: Path, section: str) -> dict[str, str]:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not parser.has_section(section):
        return {}
    return {KEYS[key]: value for key, value in parser.items(section) if key in KEYS and value}
