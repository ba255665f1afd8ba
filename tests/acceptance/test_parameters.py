"""What cannot be is said before anything runs."""

import ast

import pytest

from eagle3nb.acceptance.parameters import check
from eagle3nb.errors import UserError
from eagle3nb.record.declared import declared, notebook_of

DEFAULTS = {name: parameter.default for name, parameter in declared(notebook_of("evaluation")).items()}


def test_the_notebooks_defaults_can_be():
    check(DEFAULTS)
    check(DEFAULTS | {"engine": "sglang", "server": "http://127.0.0.1:30000", "base_model": "owner/name"})


@pytest.mark.parametrize("change", [
    "steps=0", "steps=8", "max_new_tokens=1", "bootstrap=0", "seed=-1", "limit=-1", "decode_prompts=-2",
    "cost_seconds=-1.0", "temperature=-0.5", "batches=[4]", "batches=[]", "batches=[0, 1]", "serve_at_once=0",
    "export_dtype='float64'", "server='http://a:1'", "base_model='/home/me/model'"])
def test_what_cannot_be_is_named(change):
    name, value = change.split("=", 1)
    with pytest.raises(UserError, match=name):
        check(DEFAULTS | {name: ast.literal_eval(value)})


def test_an_address_has_its_scheme():
    with pytest.raises(UserError, match="http://HOST:PORT"):
        check(DEFAULTS | {"engine": "sglang", "server": "127.0.0.1:30000"})
