"""A cluster's history under one policy or several: what each earns, what it loses, and to what.

`history.py` says what fails when, `policies/` how each system answers, `world.py` plays one against the other and
`account.py` keeps the sums. Everything here is a model of seconds and FLOP/s; the machines themselves run in
`unicron.sim`.
"""
