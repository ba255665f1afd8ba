"""A process of the tests that makes a dataset by a server, for those that kill it: `python asking.py URL FOLDER`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from synthesis.speaking import END, TOOLS, tokenizer_of

from eagle3nb.synthesis.answerer import Answerer
from eagle3nb.synthesis.answers import make
from eagle3nb.synthesis.openai_endpoint import OpenAIEndpoint
from eagle3nb.synthesis.sglang_endpoint import SGLangEndpoint
from eagle3nb.synthesis.sources import Dataset, prompt_of
from eagle3nb.synthesis.talks import language_of

PROMPTS = {"a": ["Aa?"], "b": ["Bb?", "And then?"], "c": ["Cc?"], "d": ["Dd?", "Why?", "How so?"], "e": ["Ee?"]}


def dataset(prompts=PROMPTS, **more) -> Dataset:
    asked = tuple(prompt_of(key, "X1_test", [{"role": "user", "content": text} for text in texts])
                  for key, texts in prompts.items())
    sampling = {"max_new_tokens": 40, "temperature": 0.5, "top_p": 0.9} | more
    return Dataset("X1_test", "a file", None, **sampling, asked=asked)


def asked(url: str, out, *, of=None, api: str = "openai", on_policy: bool = False, **options):
    """The Part that comes of asking the server at `url`."""
    options = {"concurrency": 1, "key_variable": ""} | options
    endpoint = OpenAIEndpoint(url + "/v1", **options) if api == "openai" else SGLangEndpoint(url, **options)
    endpoint.model = "served-model"
    who = Answerer(endpoint, "served-model", on_policy, api == "sglang")
    return make(of or dataset(), who, language_of(tokenizer_of(TOOLS), (END,)), Path(out), 1, {})


if __name__ == "__main__":
    asked(*sys.argv[1:])
