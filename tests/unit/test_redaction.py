"""What redaction treats as a secret, and what it does not."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import pytest

from holdfast.contracts import redaction
from holdfast.contracts.redaction import (
    HIDDEN,
    is_secret,
    mask_bytes,
    redact,
    redact_text,
    secrets_of,
)
from holdfast.contracts.spec.secrets import KINDS

S: Final = "Zq8vR3mK1x"
JWT: Final = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl"

SECRET_NAMES: Final = (
    *("HF_TOKEN", "WANDB_API_KEY", "MYSQL_PWD", "DB_PASS", "GITHUB_PAT", "AWS_SECRET_ACCESS_KEY"),
    *("SENTRY_DSN", "token", "--token", "--api-key", "apiKey", "accessKey", "password"),
    *("passwd", "client_secret", "clientSecret", "PGPASSWORD", "db_pass", "--db-pass"),
    *("OPENAI_KEY", "SSH_PRIVATE_KEY", "private_key", "MY_TOKEN_2", "GH_TOKEN", "credentials"),
    *("auth_token", "environment.HF_TOKEN", "BASIC_AUTH", "passphrase", "client_secret_value"),
    *("passwords", "DB_PASSWORDS", "tokens", "HF_TOKENS", "api_tokens", "apiKeys", "access_keys"),
    *("passphrases", "clientSecrets", "--api-keys", "--wandb-key", "openai_key", "hfKey"),
    *("Authorization", "Proxy-Authorization", "cookie", "Set-Cookie"),
)
OTHER_NAMES: Final = (
    *("tokenizer", "--tokenizer", "TOKENIZERS_PARALLELISM", "max_tokens", "eos_token"),
    *("num_tokens", "tokens_per_step", "tokenizers", "total_tokens", "special_tokens"),
    *("MAX_TOKENS", "warmupTokens", "bad_tokens", "sort_keys", "monkeys", "--max-new-tokens"),
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
# Each text contains S or a token of a known form, which must be redacted.
SECRET_TEXTS: Final = (
    f"machine hub login ann account lab password {S}",
    f'"source": ["os.environ[\\"OPENAI_KEY\\"] = \\"{S}\\"\\n"]',
    f'{{"msg": "first\\ntoken={S}\\nlast"}}',
    f"- name: DB_PASSWORD\n  value: {S}",
    f'[{{"name": "DB_PASSWORD", "value": "{S}"}}]',
    f'<add key="Password" value="{S}" />',
    f"requests.get(url, auth=('ann', '{S}'))",
    f"HTTPBasicAuth('ann', '{S}')",
    f"docker login -u ann -p {S} registry",
    f"aws configure set aws_secret_access_key {S}",
    f"X-Vault-Token: {S}",
    f"password: !!str '{S}'",
    f"smtp_password => {S}",
    f'db_password = "{S}',
    f"bind_pw={S} S3_CREDS={S}",
    f"key=Bearer%20{S}{S}",
    f"export HF_TOKEN={S}",
    f'export HF_TOKEN="{S}"; python train.py',
    f"MYSQL_PWD={S} mysql -u root",
    f"train.py --token {S}",
    f"train.py --token={S} --steps 5",
    f"train.py --api-key '{S}'",
    f"curl -H 'Authorization: Bearer {S}{S}' https://x",
    f"<SecretAccessKey>{S}</SecretAccessKey>",
    f"client-key-data: {S}",
    f'{{"ghcr.io": {{"auth": "{S}{S}=="}}}}',
    f"//registry.npmjs.org/:_authToken={S}",
    f"sshpass -p {S} ssh host",
    f"mysql -uroot -p{S} db",
    f"password: |\n  first\n  {S}\nnext: 1",
    f"\x1b[31mpassword\x1b[0m=\x1b[1m{S}\x1b[0m",
    f"send: b'GET / HTTP/1.1\\r\\nCookie: sid={S}; a=b\\r\\n'",
    f'Authorization: Digest username="ann", response="{S}"',
    f"https://corp.webhook.office.com/webhookb2/0123abcd-11@22/IncomingWebhook/{S}/33",
    f"https://api.telegram.org/bot110201543:{S}/sendMessage",
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOYBF{S}{S}\n-----END",
    f"12:00 INFO -----BEGIN RSA PRIVATE KEY-----\n12:00 INFO MIIE{S}{S}{S}\n12:00 INFO other",
    f"key wandb_v1_{S}{S}",
    f"xapp-1-{S}{S}",
    f"got ya29.{S}{S}",
    f"sk_live_{S}{S}",
    f"SG.{S}{S}.{S}{S}",
    f"token hvs.{S}{S} accepted",
    f"nvapi-{S}{S}",
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
    f"the password is {S}",
    f"your token was '{S}'",
    f"OPENAI_KEY={S}",
    f"hf_token: {S}",
    f"train.py --openai-token {S}",
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
    f"-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n{S}\nTraceback (most recent call",
    f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMIIEvQIBADANBgkq\n{S}",
    f"'-----BEGIN EC PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0B\\n{S}'",
    f"export DB_PASS=abc,{S}",
    f"DB_PASS=abc;{S} python train.py",
    f"--env DB_PASS=a&b){S} image",
    f"os.environ['HF_TOKEN'] = '{S}'",
    f'    os.environ["HF_TOKEN"]="{S}"',
    f'os.environ.setdefault("HF_TOKEN", "{S}")',
    f"['train.py', '--token', '{S}']",
    f"train.py --token -{S}",
    f"train.py --token --{S}",
    f"curl -u me:{S} https://x",
    f"curl --user 'me:{S}' https://x",
    f"curl --proxy-user=me:{S} https://x",
    f"passwords: {S}",
    f"HF_TOKENS={S},other",
    f"tokens: {S}",
    f"'password': ['{S}']",
    f"DB_PASS=[ab]{S}",
    f"DB_PASS={{ab}}{S}",
    f"DB_PASS=[]{S}",
    f'"token": {{"x": "{S}"}}',
    f'"token": [\n  "x",\n  "{S}"\n]',
    f"{{'credentials': {{'user': 'me', 'key': '{S}",
    f'{{"tokens": ["{S}"]}}',
    f'{{"Authorization": "token {S}"}}',
    f"headers={{'authorization': 'token {S}', 'accept': '*/*'}}",
    f"https://bucket.s3.amazonaws.com/x?X-Amz-Date=1&X-Amz-Signature={S}",
    f"signature={S}{S}, of the request",
    f"https://a.blob.core.windows.net/c/x?sv=2020-08-04&sig={S}%2B{S}%3D",
    f"https://storage.googleapis.com/b/o?Expires=1&Signature={S}{S}%3D",
    f"https://hooks.slack.com/services/T00000000/B00000000/{S}{S}",
    f"https://discord.com/api/webhooks/1234567890/{S}{S}",
    f"machine api.wandb.ai login user password {S}",
    f"machine x\n  login me\n  password {S}\n",
    f"train.py --wandb-key={S}",
)
SHOWN_BESIDE: Final = (
    (f"https://x.example/?access_token={S}&page=2", "&page=2"),
    (f"train.py --token {S} --steps 5", "--steps 5"),
    (f"train.py --token -{S} -v", " -v"),
    (f"-----BEGIN PRIVATE KEY-----\n{S}\nTraceback (most recent call", "Traceback (most"),
    (f"['--token', '{S}', '--steps', '5']", "'--steps', '5']"),
    (f"curl -u me:{S} https://x", "https://x"),
)
PLAIN_TEXTS: Final = (
    "- name: num_tokens\n  value: 4096",
    "score_pass 12 of 15, tokens_seen 1048576",
    'C:\\new\\tokenizer: "gpt2',
    "pw=0.5 first_pass=12",
    "Basic authentication is not supported, Bearer authentication is",
    "METRIC_KEY=eval_accuracy",
    "export SORT_KEY=step_10",
    "METRIC_KEY=eval_accuracy SORT_KEY=creationtime",
    "X_KEY=eval_accuracy X_KEY=validation-loss X_KEY=Accuracy X_KEY=loss",
    "FEATURE_KEY: embeddings",
    "next_token: world",
    "the token is missing",
    "the password is empty, the key is step_00000100",
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
    "the login page has a password field",
    "killed by sig=15, signature=(x: int) -> None",
    "https://hooks.slack.com/services",
    "the signature=forward of the model",
    "cookies: 3",
    "tokens=1048576, loss=2.1",
    "tokens: 15T",
    "tokens: tensor([1, 2])",
    "tokens: [15496, 995, 11]",
    "tokens: ['hello', 'world']",
    "{'secrets': [], 'tokens': {}, 'password': [ ], 'steps': 5}",
    'HF_TOKEN = { from_env = "HF_TOKEN" }',
    "'HF_TOKEN': {'from_file': '~/.token'}, 'X': 1",
    "loss per token: 2.31, step 5",
    "special_tokens: <pad>,<eos>",
    "train.py --token --steps 5",
    "['train.py', '--token', '--steps', '5']",
    "docker run -u 1000:1000 image",
    "login(token=None)",
    "use(token=True, steps=5)",
    'keys = ("token", "loss")',
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_values_under_secret_names_are_recognized(name: str) -> None:
    assert is_secret(name, S)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_have_no_secret(name: str) -> None:
    assert not is_secret(name, "gpt2-small")


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_secrets_in_texts_are_redacted_and_masked(text: str) -> None:
    redacted = redact_text(text)
    assert HIDDEN in redacted
    assert S not in redacted
    assert len(mask_bytes(text.encode())) == len(text.encode())
    assert S.encode() not in mask_bytes(text.encode())


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_texts_without_secrets_are_unchanged(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the password is hunter2hunter2", f"the password is {HIDDEN}"),
        (f"wandb login --relogin {'0123456789' * 4}", f"wandb login --relogin {HIDDEN}"),
        # The names of people's passwords do not need a random value.
        ("DB_PASS=correcthorse", f"DB_PASS={HIDDEN}"),
        ("WANDB_API_KEY=abcdefgh", f"WANDB_API_KEY={HIDDEN}"),
        ("X_KEY=hunterhunter", f"X_KEY={HIDDEN}"),
        ("export X_KEY='hunterhunter'; python t.py", f"export X_KEY='{HIDDEN}'; python t.py"),
        ("X_KEY=hunterhunter;env", f"X_KEY={HIDDEN}"),
    ],
)
def test_secrets_without_an_assignment_or_digits_are_redacted(text: str, shown: str) -> None:
    assert redact_text(text) == shown


@pytest.mark.parametrize(("text", "beside"), SHOWN_BESIDE)
def test_the_text_beside_a_secret_is_shown(text: str, beside: str) -> None:
    assert beside in redact_text(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("password", 12345678),
        ("pin_secret", 1234.5),
        ("token", [S]),
        ("token", {"x": S}),
        ("credentials", {"user": "me", "nested": [{"key": S}]}),
        ("passwords", [S, "x"]),
        ("passwords", {"db": S}),
        ("tokens", [S]),
        ("hf_tokens", S),
        ("api_keys", {"one": S}),
        # A table with two keys is not a reference.
        ("token", {"from_env": "NAME", "value": S}),
    ],
)
def test_every_type_of_value_under_a_secret_key_is_hidden(key: str, value: Any) -> None:
    assert redact({"config": {key: value}}) == {"config": {key: HIDDEN}}
    assert S not in redact_text(f"it said {S}", secrets_of({key: [value, S]}))


@pytest.mark.parametrize(
    "shown",
    [
        {"max_tokens": 4096, "num_tokens": "10B", "tokens_per_step": 1 << 20},
        {"tokenizer": ["gpt2"], "tokenizers": {"a": "gpt2"}, "special_tokens": ["<pad>"]},
        {"tokens": 300_000_000_000},
        {"tokens": "15T"},
        {"tokens": [15496, 995]},
        {"tokens": {"train": "1.5B", "eval": 10_000_000}},
        {"token": None, "use_auth_token": True, "password": "", "secrets": [], "credentials": {}},
        {"HF_TOKEN": {"from_env": "HF_TOKEN"}, "DB_PASS": {"prefect_secret": "db"}},
        {"token": {"from_file": "~/.token"}},
    ],
)
def test_settings_that_are_not_secrets_are_shown(shown: dict[str, Any]) -> None:
    assert redact(shown) == shown
    assert secrets_of(shown) == ()


def test_a_password_of_letters_under_the_name_of_a_key_is_hidden() -> None:
    spec = {"environment": {"X_KEY": "hunterhunter", "METRIC_KEY": "perplexities"}}
    shown = {"environment": {"X_KEY": HIDDEN, "METRIC_KEY": "perplexities"}}
    assert redact(spec) == shown
    assert secrets_of(spec) == ("hunterhunter",)


def test_redaction_knows_every_kind_of_secret_reference() -> None:
    assert frozenset(KINDS) == redaction._REFERENCES


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--token", f"-{S}", "-v"], ["--token", HIDDEN, "-v"]),
        (["--token", f"--{S}", "5"], ["--token", HIDDEN, "5"]),
        (["--token", "--steps", "5"], ["--token", "--steps", "5"]),
        (["--password", 12345678], ["--password", HIDDEN]),
        (["curl", "-u", f"me:{S}", "https://x"], ["curl", "-u", HIDDEN, "https://x"]),
        (["docker", "-u", "1000:1000", "x"], ["docker", "-u", "1000:1000", "x"]),
    ],
)
def test_values_of_secret_options_in_a_command_are_hidden(
    command: list[Any], shown: list[Any]
) -> None:
    assert redact(command) == shown


def test_secrets_in_every_part_of_a_spec_are_redacted() -> None:
    spec: dict[str, Any] = {
        "command": ["train.py", "--token", S, "--tokenizer", "gpt2", f"--api-key={S}"],
        "environment": {"DB_PASS": S, "MODE": "fast", "REF": {"from_file": "~/.token"}},
        "config": {"nested": [{"password": S}], "max_tokens": 512, "eos_token": "</s>"},
        "launch": {"setup": ["module load cuda", f"export HF_TOKEN={S}"]},
        "checkpoint": {"mirror": f"https://me:{S}@store/x"},
    }
    redacted = redact(spec)
    assert S not in json.dumps(redacted)
    assert redacted["command"] == [
        "train.py",
        "--token",
        HIDDEN,
        "--tokenizer",
        "gpt2",
        f"--api-key={HIDDEN}",
    ]
    assert redacted["environment"]["MODE"] == "fast"
    assert redacted["environment"]["REF"] == {"from_file": "~/.token"}
    assert redacted["config"]["max_tokens"] == 512
    assert redacted["config"]["eos_token"] == "</s>"
    assert secrets_of(spec) == (S,)
    assert (
        redact_text(f"it printed {S} plainly", secrets_of(spec)) == f"it printed {HIDDEN} plainly"
    )


@pytest.mark.more
@pytest.mark.parametrize(
    "part",
    [
        *(
            "a=",
            "--a ",
            "x",
            "http://",
            "a:b@",
            "token=",
            "token=,",
            "token='",
            'token="',
            "token ",
        ),
        *("--token ", "--token -", "a_token=x;", "['token']=", "f('token',", "'--token','"),
        *("tokens=a1", "-u a:", "-u a", "--user=", "a.b-", "-----BEGIN PRIVATE KEY-----"),
        *("-----BEGIN PRIVATE KEY-----\n", "-----BEGIN PRIVATE KEY-----abc\n\n", "-----BEGIN A "),
        *("\\n", "Proc-Type:", "Bearer ", "cookie:", "eyJ", "password: ", "a_", "?token=a&"),
        *("password is ", "key is a1", "wandb login ", "wandb login --a "),
        *("token=[", "tokens=[", "tokens={", "token={}", "tokens=['a',", "tokens=aaaaaaa"),
    ],
)
def test_redaction_time_is_linear_in_the_length(part: str) -> None:
    """A text of twice the length may take little more than twice the time."""
    times = []
    for size in (100_000, 200_000):
        text = (part * size)[:size]
        began = time.process_time()
        redact_text(text)
        redact_text(f"-----BEGIN PRIVATE KEY-----{text}")
        times.append(time.process_time() - began)
    assert times[1] < 2
    assert times[1] < 3.5 * times[0] + 0.2
