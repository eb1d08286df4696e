"""What is taken for a secret, and what is not."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import pytest

from holdfast.contracts.redaction import (
    HIDDEN,
    is_secret,
    mask_bytes,
    redact,
    redact_text,
    secrets_of,
)

S: Final = "Zq8vR3mK1x"
JWT: Final = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"

SECRET_NAMES: Final = (
    *("HF_TOKEN", "WANDB_API_KEY", "MYSQL_PWD", "DB_PASS", "GITHUB_PAT", "AWS_SECRET_ACCESS_KEY"),
    *("SENTRY_DSN", "token", "--token", "--api-key", "apiKey", "accessKey", "password"),
    *("passwd", "client_secret", "clientSecret", "PGPASSWORD", "db_pass", "--db-pass"),
    *("OPENAI_KEY", "SSH_PRIVATE_KEY", "private_key", "MY_TOKEN_2", "GH_TOKEN", "credentials"),
    *("auth_token", "environment.HF_TOKEN", "BASIC_AUTH", "passphrase", "client_secret_value"),
)
PLAIN_NAMES: Final = (
    *("tokenizer", "--tokenizer", "TOKENIZERS_PARALLELISM", "max_tokens", "tokens", "eos_token"),
    *("pad_token", "PWD", "OLDPWD", "forward_pass", "passes", "bypass", "compass", "file_pat"),
    *("pattern", "sort_key", "cache_key", "key", "keys", "monkey", "PRIMARY_KEY", "author"),
    *(
        "num_tokens_per_batch",
        "token_dim",
        "TOKEN_FILE",
        "secret_file",
        "SecretError",
        "keyboard",
        "path",
    ),
    *("eos_token_id", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MASTER_PORT", "image_key"),
)
# Each holds S, or a token of a known form, which must go.
SECRET_TEXTS: Final = (
    f"export HF_TOKEN={S}",
    f'export HF_TOKEN="{S}"; python train.py',
    f"MYSQL_PWD={S} mysql -u root",
    f"train.py --token {S}",
    f"train.py --token={S} --steps 5",
    f"train.py --api-key '{S}'",
    f"curl -H 'Authorization: Bearer {S}{S}' https://x",
    f"Authorization: Basic {S}{S}=",
    f"postgresql://user:{S}@db/runs",
    f"redis://:{S}@cache:6379/0",
    f"https://oauth2:{S}@git.example/repo.git",
    f"https://{S}{S}@git.example/repo.git",
    f"https://x.example/?access_token={S}&page=2",
    f"https://bucket/key?X-Amz-Security-Token={S}",
    f"host=db user=me password={S} dbname=runs",
    f"{{'token': '{S}'}}",
    f'{{"api_key": "{S}"}}',
    f"password: {S}",
    f"ValueError: bad client_secret='{S}'",
    f"-e WANDB_API_KEY={S}",
    f"DB_PASS={S}\nOTHER=1",
    f"set GITHUB_PAT={S} now",
    f"DATABASE_DSN={S}",
    "login with hf_abcdefghijklmnopqrstuvwxyz",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789 was refused",
    "key sk-proj-abcdefghijklmnopqrstuvwxyz012345",
    "AKIAIOSFODNN7EXAMPLE is the key",
    f"got {JWT} back",
    "xoxb-1234567890-abcdefghij",
    f"-----BEGIN RSA PRIVATE KEY-----\n{S}\n-----END RSA PRIVATE KEY-----",
)
PLAIN_TEXTS: Final = (
    "train.py --tokenizer gpt2 --steps 100",
    "tokenizer: gpt2",
    "tokenizer=gpt2",
    "loss per token: 2.3145",
    "tokens: 1048576",
    "max_tokens=4096",
    "per token: 3.2e-4",
    "the key: value pairs of the cache",
    "https://example.org/a/b?page=2&sort=name",
    "https://user@example.org/repo.git",
    "file:///scratch/runs/gpt",
    "s3://bucket/prefix/step-00000100",
    "PWD=/home/ann/project",
    "forward_pass: 0.31 s",
    "pad_token=<pad>",
    "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
    "12:30:01 step 100 loss 3.2",
    "Traceback (most recent call last):",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "password is asked for at the prompt",
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_secrets_in_texts(text: str) -> None:
    told = redact_text(text)
    assert HIDDEN in told
    assert S not in told
    assert len(mask_bytes(text.encode())) == len(text.encode())
    assert S.encode() not in mask_bytes(text.encode())


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_texts_without_secrets_stay(text: str) -> None:
    assert redact_text(text) == text


def test_a_spec_is_redacted_wherever_a_secret_stands() -> None:
    spec: dict[str, Any] = {
        "command": ["train.py", "--token", S, "--tokenizer", "gpt2", f"--api-key={S}"],
        "environment": {"DB_PASS": S, "MODE": "fast", "REF": {"from_file": "~/.token"}},
        "config": {"nested": [{"password": S}], "max_tokens": 512, "eos_token": "</s>"},
        "launch": {"setup": ["module load cuda", f"export HF_TOKEN={S}"]},
        "checkpoint": {"mirror": f"https://me:{S}@store/x"},
    }
    told = redact(spec)
    assert S not in json.dumps(told)
    assert told["command"] == [
        "train.py",
        "--token",
        HIDDEN,
        "--tokenizer",
        "gpt2",
        f"--api-key={HIDDEN}",
    ]
    assert told["environment"]["MODE"] == "fast"
    assert told["environment"]["REF"] == {"from_file": "~/.token"}
    assert told["config"]["max_tokens"] == 512
    assert told["config"]["eos_token"] == "</s>"
    assert secrets_of(spec) == (S,)
    assert (
        redact_text(f"it printed {S} plainly", secrets_of(spec)) == f"it printed {HIDDEN} plainly"
    )


def test_a_long_text_takes_no_long_time() -> None:
    for text in (
        "a=" * 50_000,
        "--a " * 50_000,
        "x" * 500_000,
        "http://" * 50_000,
        "a:b@" * 50_000,
    ):
        began = time.perf_counter()
        redact_text(text)
        assert time.perf_counter() - began < 5
