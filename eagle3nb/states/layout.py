"""Names of what lies in a store's folder (manifest.py says what each is). Apart, for who must not load torch."""

import re

SCHEMA = 2
MANIFEST, HEAD, LOCK = "manifest.json", "head.safetensors", ".lock"
OWN = re.compile(r"(shard-\d{7,}-\d{7,}\.safetensors|head\.safetensors|manifest\.json)(\.\d+\.partial|\.claim)?")
