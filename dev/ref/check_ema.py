#!/usr/bin/env python3
"""
The averaged weights of a run, from its checkpoints of every step: python dev/ref/check_ema.py RUN DECAY

RUN was trained with --ema DECAY --save-every 1 and keeps all its checkpoints. The average is computed anew from their
model.safetensors; that of each ema.safetensors must have the same bits. Ends with "N passed, N failed".
"""
import glob
import os
import sys

import numpy as np

from exact import ema, ema_weight, read_safetensors

run, decay = sys.argv[1], float(sys.argv[2])
average, n_passed, steps = None, 0, sorted(glob.glob(os.path.join(run, "step_*")))
for t, folder in enumerate(steps, 1):
    weights = read_safetensors(os.path.join(folder, "model.safetensors"))
    average = average or {name: np.zeros_like(p) for name, p in weights.items()}
    average = {name: ema(average[name], p, ema_weight(decay, t)) for name, p in weights.items()}
    found = read_safetensors(os.path.join(folder, "ema.safetensors"))
    different = [name for name in average if found[name].tobytes() != average[name].tobytes()]
    n_passed += not different and found.keys() == average.keys()
    print(f"{folder}: other bits in", *different[:3]) if different else None
print(f"{n_passed} passed, {len(steps) - n_passed} failed")
sys.exit(n_passed == 0 or n_passed < len(steps))
