"""The numbers of the work and of the faults, the same for every system; nothing is imported for them."""

from __future__ import annotations

import os

#: PEERS_MACHINE=gpu: two ranks, a GPU each, over NCCL, and a model that keeps one busy. Else four on cores, over gloo.
ON_GPUS = os.environ.get("PEERS_MACHINE", "cpu") == "gpu"
LAYERS, HIDDEN, HEADS, SEQ_LENGTH = (8, 512, 8, 256) if ON_GPUS else (4, 64, 4, 64)
VOCABULARY = 256
WORLD_SIZE = 2 if ON_GPUS else 4
VICTIM = WORLD_SIZE // 2  # the rank that a fault strikes
BACKEND = "nccl" if ON_GPUS else "gloo"
CHECKPOINT_EVERY = 10 if ON_GPUS else 1  # iterations; of the GPUs' model one takes as long as several of these
MICRO_BATCH = 2  # samples
NUM_MICRO_BATCHES = 8
SAMPLES = MICRO_BATCH * NUM_MICRO_BATCHES  # of an iteration
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0
SEED = 1234

FAULT_ITERATION = 25  # by then what a system keeps in reserve is there
COMPARED = 35  # iterations after which weights are compared with the undisturbed run's
STEADY = (10, 45)  # iterations between which an undisturbed run's CPU time is taken
REACTION_S_MAX = 120.0  # no commit by then: written as such
FULL_S_MAX = 45.0  # since the fault; a width that is not whole by then is written as such
REVIVE_S = 5.0  # what was killed from outside is started again so much later, as an operator or a scheduler would
