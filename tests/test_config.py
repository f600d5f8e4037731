from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from realtime.config import Config, as_dict, load
from realtime.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "test.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_everything_has_its_default() -> None:
    assert load(None) == Config()


def test_a_file_changes_only_the_keys_it_names(tmp_path: Path) -> None:
    config = load(write(tmp_path, '[server]\nport = 9000\nallowed_origins = ["https://a.example"]\n'))
    assert config.server.port == 9000
    assert config.server.allowed_origins == ("https://a.example",)
    assert config.server.host == Config().server.host
    assert config.engine == Config().engine


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "[server]\nport = 9000\nmax_connections = 5\n")
    config = load(path, ["server.port=9001", "server.port = 9002"])
    assert (config.server.port, config.server.max_connections) == (9002, 5)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("server.host=0.0.0.0", "0.0.0.0"),
        ('server.host="::1"', "::1"),
        ("server.token=a=b", "a=b"),
        ("server.token=", ""),
        ("server.port=0", 0),
        ("server.drain_s=3", 3.0),
        ("engine.queue_s=0.25", 0.25),
        ('server.allowed_origins=["*"]', ("*",)),
        ("model.path=/models/my voice", "/models/my voice"),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_word(override: str, value: object) -> None:
    section, key = override.partition("=")[0].split(".")
    loaded = getattr(getattr(load(None, [override]), section), key)
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.max_stream=4", r"no key engine\.max_stream, did you mean 'max_streams'\?"),
        ("engin.max_streams=4", r"no section \[engin\], did you mean 'engine'\?"),
        ("engine.zzz=4", r"no key engine\.zzz; known: max_streams, queue_s"),
        ("zzz.port=4", r"no section \[zzz\]; known: server, model, engine, vocoder"),
        ("server.port", r"takes section\.key=value, got 'server\.port'"),
        ("port=4", r"takes section\.key=value, got 'port=4'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, [override])


@pytest.mark.parametrize(
    "override",
    [
        "server.port=8000.5",
        'server.port="8000"',
        "server.port=true",
        "server.drain_s=soon",
        "server.drain_s=false",
        "server.allowed_origins=https://a.example",
        "server.allowed_origins=[1]",
        "model.path=[]",
    ],
)
def test_a_wrong_type_is_refused_with_the_default_as_example(override: str) -> None:
    name = override.partition("=")[0].replace(".", r"\.")
    with pytest.raises(ConfigError, match=f"--set: {name} must be like "):
        load(None, [override])


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("server.port", 0, 65535),
        ("server.max_connections", 1, 100_000),
        ("server.drain_s", 0, 3600),
        ("engine.max_streams", 1, 1024),
        ("engine.queue_s", 0, 60),
        ("vocoder.max_frames", 1, 100),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(name: str, low: int, high: int) -> None:
    load(None, [f"{name}={low}", f"{name}={high}"])
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"{name} must be from {low} to {high}, got {value}"):
            load(None, [f"{name}={value}"])


def test_no_number_is_no_number_of_seconds() -> None:
    with pytest.raises(ConfigError, match="got nan"):
        load(None, ["server.drain_s=nan"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server\n", "is no valid TOML"),
        ("server = 1\n", r"\[server\] must be a section of keys, got 1"),
        ("[server]\nprot = 1\n", r"test\.toml: no key server\.prot, did you mean 'port'\?"),
        ("[server]\nport = -1\n", "server.port must be from 0 to 65535, got -1"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, text))


def test_a_missing_file_or_one_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no valid TOML"):
        load(tmp_path / "binary.toml")


def test_the_settings_shown_at_start_hide_the_token() -> None:
    secret = load(None, ["server.token=hunter2"])
    assert as_dict(secret)["server"]["token"] == "(set)"
    assert "hunter2" not in str(as_dict(secret))
    assert as_dict(Config())["server"]["token"] == ""
    assert secret.server.token == "hunter2"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_file_in_configs_loads(path: Path) -> None:
    load(path)


def test_the_default_file_names_every_key_with_its_default() -> None:
    path = CONFIGS / "wren.toml"
    assert load(path) == Config()
    named = {section: set(keys) for section, keys in tomllib.loads(path.read_text()).items()}
    assert named == {section: set(keys) for section, keys in as_dict(Config()).items()}


def test_a_token_of_digits_needs_no_quotes_and_a_wrong_one_is_not_printed(tmp_path: Path) -> None:
    assert load(None, ["server.token=123"]).server.token == "123"
    path = tmp_path / "secret.toml"
    path.write_text("[server]\ntoken = 4711\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "4711" not in caught.value.message
    with pytest.raises(ConfigError):
        load(None, [f"server.drain_s={10**400}"])
