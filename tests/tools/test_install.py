"""What uv is told of pip's settings."""

import pytest

from tools.install import Untranslatable, environment, settings

LISTING = r"""
:env:.find-links='/wheels /more'
global.extra-index-url='https://one.example/simple\nhttps://two.example/simple'
global.find-links='/else'
global.index-url='https://mirror.example/simple'
install.index-url='https://nearer.example/simple'
download.index-url='https://far.example/simple'
"""


def test_the_environment_goes_before_the_command_and_the_command_before_all() -> None:
    assert settings(LISTING) == {
        "find-links": "/wheels /more",
        "extra-index-url": "https://one.example/simple\nhttps://two.example/simple",
        "index-url": "https://nearer.example/simple",
    }


def test_lists_are_separated_as_uv_reads_them() -> None:
    assert environment(settings(LISTING)) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_DEFAULT_INDEX": "https://nearer.example/simple",
    }


def test_a_setting_that_uv_would_not_get_is_not_lost() -> None:
    with pytest.raises(Untranslatable, match="no-binary"):
        environment({"no-binary": ":all:"})
    assert environment({"quiet": "1"}) == {"UV_INDEX_STRATEGY": "unsafe-best-match"}
