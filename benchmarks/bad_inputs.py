"""Bad command lines of `python -m pipelines.run`, each with a word that its message has to hold."""

BAD = [
    (["selector.lr=nan"], "selector.lr"),
    (["selector.lr=-1"], "selector.lr"),
    (["selector.dropout=2"], "selector.dropout"),
    (["selector.width=0"], "selector.width"),
    (["model.device=banana"], "model.device"),
    (["model.dtype=float7"], "model.dtype"),
    (["model.threads=-3"], "model.threads"),
    (["evaluation.settings=[]"], "evaluation.settings"),
    (["evaluation.methods=[nonsense]"], "evaluation.methods"),
    (["latency.contexts=[1000000000]"], "latency.contexts"),
    (["no.such.key=1"], "no.such.key"),
    (["stage=nonsense"], "stage"),
    (["data.source=/nowhere/at/all.jsonl"], "/nowhere/at/all.jsonl"),
    (["model.target=/nowhere/model"], "/nowhere/model"),
    (["traces.samples=x"], "traces.samples"),
    (["run=../.."], "run"),
    (["run="], "run"),
    (["draft.steps=-1"], "draft.steps"),
    (["data.held_out=1.5"], "data.held_out"),
    (["stage=traces"], "stage=pair"),
]
