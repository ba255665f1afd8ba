"""The larger profile's corpus: no evaluation prompt is among what it asks, for any seed of its parts."""

from pathlib import Path

import pytest
import yaml

from eagle3nb.synthesis.prompts import expand, expand_held_out, load_recipes
from eagle3nb.synthesis.sources import datasets

ROOT = Path(__file__).resolve().parents[2]
PROFILE = {name: yaml.safe_load((ROOT / f"params/smollm2/{name}.yml").read_text()) for name in ("common", "synthesis")}
PARTS = PROFILE["synthesis"]["parts"]
RECIPES = [recipe for recipe in load_recipes(ROOT / "data/prompts") if not recipe.name.startswith("A1")]


def plain(text):
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def grams(text, n=4):
    words = plain(text).split()
    return {tuple(words[i:i + n]) for i in range(len(words) - n + 1)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_held_out_prompts_are_never_asked(recipe):
    """None occurs in a training prompt, and at most half of its runs of four words stand in any one."""
    asked = {message["content"] for seed in range(1, 1 + PARTS) for prompt in expand(recipe, seed)
             for turn in (prompt.opening, *prompt.later) for message in turn if message["role"] != "system"}
    held = [prompt.opening[-1]["content"] for prompt in expand_held_out(recipe, 1)]
    assert len(asked) > len(expand(recipe, 1)) and len(held) >= 5
    for text in held:
        own = grams(text)
        assert not any(plain(text) in plain(other) for other in asked)
        assert max(len(own & grams(other)) for other in asked) <= 0.5 * len(own), text


def test_what_is_made_is_what_is_trained_on():
    common, own = PROFILE["common"], PROFILE["synthesis"]
    made = datasets(own["prompts"], data_root=common["data_root"], exclude=common["exclude"], max_new_tokens=1,
                    temperature=1.0, top_p=1.0)
    assert [dataset.recipe for dataset in made] == RECIPES and PARTS == 4
    assert not {"exclude", "datasets", "seed", "data_root"} & set(own), "the stages after it would read another corpus"


@pytest.mark.parametrize("stage", ["audit", "extraction", "training"])
def test_what_differs_from_the_demo_is_the_data(stage):
    """So that two records can be put side by side; `minutes` would make the result depend on the machine."""
    ours, demo = (yaml.safe_load((ROOT / f"params/{name}/{stage}.yml").read_text()) for name in ("smollm2", "demo"))
    assert ours | {"minutes": 0} == demo | {"minutes": 0}
