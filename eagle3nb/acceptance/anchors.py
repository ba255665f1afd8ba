"""Published acceptance lengths of EAGLE-3 drafters, to stand beside one's own and never among them.

Another target, engine, temperature, batch or set of prompts gives another figure for the same drafter, so each row has
its settings, and None where its source does not state one. Chains draft one token a step; trees verify many candidates
and reach other lengths, so they are no measure for a chain. All are served figures with the bonus token, as τ here.
"""

from dataclasses import asdict, dataclass

BENCHMARKS = ("mtbench", "humaneval", "gsm8k")  # that prompts.py knows; the others are here for completeness
TREE = 0  # `topk` of a tree whose width is not stated
SPECFORGE, PAPER = "SpecForge, SpecBundle data.json (arXiv 2603.18567)", "EAGLE-3 paper (arXiv 2503.01840)"


@dataclass(frozen=True)
class Anchor:
    """One published figure. `topk` 1 is a chain; temperature 0 is greedy."""

    who: str
    target: str
    benchmark: str
    tau: float
    source: str
    steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    temperature: float | None = None
    batch: int | None = None
    engine: str | None = None

    @property
    def kind(self) -> str:
        return {1: "chain", None: "unknown"}.get(self.topk, "tree")

    @property
    def setting(self) -> str:
        """Steps, top-k and draft tokens as engines' flags have them, then what else is stated."""
        flags = "-".join("?" if value is None else str(value) for value in (self.steps, self.topk, self.draft_tokens))
        if self.kind == "tree":
            flags = f"tree, {self.steps} steps"
        said = [f"batch {self.batch}" if self.batch else "", "greedy" if self.temperature == 0 else "",
                self.engine or ""]
        return ", ".join(filter(None, [flags, *said]))


def anchors() -> list[Anchor]:
    """All of them, as their sources state them."""
    return [*specbundle(), *kimi(), *small(), *paper()]


def chain(who, target, figures: dict, source, steps=3, **more) -> list[Anchor]:
    return [Anchor(who, target, benchmark, tau, source, steps=steps, topk=1, draft_tokens=steps + 1, **more)
            for benchmark, tau in figures.items()]


def specbundle() -> list[Anchor]:
    """3-1-4, then 7-1-8; the batch where it is stated."""
    k2, llama = "Kimi-K2-Instruct", "Llama-3.1-8B-Instruct"
    found = [
        (k2, 3, 8, {"mtbench": 2.39, "gsm8k": 3.27, "math500": 3.47, "humaneval": 3.36, "livecodebench": 3.16,
                    "financeqa": 2.98, "gpqa": 2.90}),
        (k2, 7, 8, {"mtbench": 2.78, "gsm8k": 4.66, "math500": 5.38, "humaneval": 5.16, "livecodebench": 4.40,
                    "financeqa": 3.94, "gpqa": 3.70}),
        (llama, 3, 1, {"mtbench": 2.90, "math500": 3.48, "humaneval": 3.34}),
        (llama, 7, 1, {"mtbench": 3.86, "math500": 5.40, "humaneval": 4.91}),
        ("Qwen3-30B-A3B", 3, None, {"mtbench": 2.50, "math500": 3.40, "humaneval": 3.35}),
        ("Qwen3-235B", 3, None, {"mtbench": 2.35, "humaneval": 3.24}),
        ("Qwen3-Coder-480B", 3, None, {"humaneval": 3.50}), ("Qwen3-Coder-480B", 7, None, {"humaneval": 5.63}),
        ("Qwen3-Next-80B", 3, None, {"mtbench": 2.58}), ("Ling-flash", 3, None, {"mtbench": 2.39}),
        ("Llama-3.3-70B", 3, None, {"mtbench": 2.96}), ("Llama-4-Scout", 3, None, {"mtbench": 2.49}),
    ]
    return [row for target, steps, batch, figures in found
            for row in chain("SpecForge", target, figures, SPECFORGE, steps, batch=batch, engine="SGLang")]


def kimi() -> list[Anchor]:
    """Drafters of Kimi targets; 3-1-4 unless their source says otherwise."""
    k25 = "Kimi-K2.5"
    return [
        *chain("lightseekorg/kimi-k2.5-eagle3, phase 1", k25, {"mtbench": 2.624, "gsm8k": 3.123, "humaneval": 3.242,
               "math500": 3.323, "aime": 2.972, "c-eval": 1.482}, "its model card"),
        *chain("lightseekorg/kimi-k2.5-eagle3, phase 2", k25, {"mtbench": 2.687, "gsm8k": 3.201, "humaneval": 3.285,
               "math500": 3.342, "aime": 3.033, "c-eval": 2.295}, "its model card"),
        *chain("lightseekorg/kimi-k2.5-eagle3-mla", k25, {"mtbench": 2.940, "gsm8k": 3.017, "humaneval": 2.969,
               "math500": 3.051, "aime": 3.139, "c-eval": 2.829}, "its model card", engine="vLLM"),
        *chain("nvidia/Kimi-K2.6-Eagle3", "Kimi-K2.6", {"mtbench": 2.62, "speed-bench": 2.67}, "its model card"),
        *chain("AQ-MedAI/Kimi-K2-Instruct-eagle3", "Kimi-K2-Instruct", {"gsm8k": 3.165, "humaneval": 3.372,
               "math500": 3.490}, "its model card"),
        *chain("AQ-MedAI/Kimi-K25-eagle3", k25, {"gsm8k": 3.07}, "vllm #35966 (51.78 % of 4 accepted)", 4,
               engine="vLLM"),
        *chain("kimi-k2.6-eagle3.1-mla", "Kimi-K2.6", {"gsm8k": 3.20}, "sglang #26506", engine="SGLang"),
        *chain("kimi-k3-eagle3-mla", "Kimi-K3", {"aime": 2.99, "chat": 1.94}, "tokenspeed #1305"),
        *chain("k2.6-eagle3-mla", "Kimi-K2.6", {"held-out multi-turn traffic": 2.30}, "k-l-lambda"),
    ]


def small() -> list[Anchor]:
    """Little data, short training: what a first run looks like."""
    return [
        *chain("speculators' example, 5 K UltraChat rows, 5 epochs", "Llama-3.1-8B-Instruct", {"mtbench": 1.49},
               "speculators 0.9.0, examples/train", engine="vLLM"),
        *chain("speculators", "Qwen3-8B", {"humaneval": 3.19}, "speculators PR #491", 5),
        Anchor("50 K ShareGPT rows, 5 epochs", "Qwen2.5-7B", "gsm8k", 1.94, "SpecForge #128"),
    ]


def paper() -> list[Anchor]:
    """Trees of 8 steps, greedy; the width is not in the table that was read."""
    figures = {
        "Vicuna-13B": {"mtbench": 6.65, "humaneval": 7.54, "gsm8k": 6.29, "alpaca": 6.17},
        "Llama-3.1-8B-Instruct": {"mtbench": 6.13, "humaneval": 6.74, "gsm8k": 6.23, "alpaca": 6.70},
        "Llama-3.3-70B": {"mtbench": 5.63, "humaneval": 6.52, "gsm8k": 6.15, "alpaca": 6.09},
        "R1-Distill-Llama-8B": {"mtbench": 5.58, "humaneval": 6.38, "gsm8k": 6.93, "alpaca": 5.37},
    }
    return [Anchor("EAGLE-3 paper", target, benchmark, tau, PAPER, steps=8, topk=TREE, temperature=0.0)
            for target, taus in figures.items() for benchmark, tau in taus.items()]


def beside(benchmarks, steps: int | None = None, trees: bool = False) -> list[dict]:
    """Published rows of the benchmarks that one's own table has, to be shown in a table of their own.

    {benchmark, tau, kind, setting, who, target, source, and every setting apart}; by benchmark, then chains of as many
    steps, other chains, unstated ones. `trees` gives the trees instead, and nothing else. Empty where there are none:
    of the demo's sources nobody has published anything.
    """
    names = list(dict.fromkeys(benchmarks))
    kept = [a for a in anchors() if a.benchmark in names and (a.kind == "tree") is trees]
    order = {"chain": 0, "unknown": 1, "tree": 2}
    kept.sort(key=lambda a: (names.index(a.benchmark), order[a.kind], a.steps != steps, a.steps or 0, -a.tau))
    return [{"benchmark": a.benchmark, "tau": a.tau, "kind": a.kind, "setting": a.setting, "who": a.who,
             "target": a.target, "source": a.source,
             **{key: value for key, value in asdict(a).items() if key in
                ("steps", "draft_tokens", "temperature", "batch", "engine")},
             "topk": a.topk or None} for a in kept]
