"""The main job on one machine: a GPT trained undisturbed and disturbed, and the two compared.

In the workers run train, model and record (torch, megatron). In the command run scenarios, compare
and results (pure), watch and runner (the cluster), progress and report (people); none of these
imports torch."""
