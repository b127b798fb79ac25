"""T(t, x): the FLOP/s that the best layout of a task achieves on x GPUs (arXiv 2401.00134, section 5).

    table = throughput(task, machine_of("H100-80GB"), calibration_of("H100-80GB"), gpus_max=1024)
    table.flops[256], table.layouts[256]

`search.py` tries every layout, `model.py` times one, `memory.py` says whether it fits, `calibration.json` holds what
was measured; `measured.py` puts what a running task shows in the model's place.
"""
