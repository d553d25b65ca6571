"""Co-simulation: real tokens, verdicts and gradients under the simulated cluster's clock.

It is the simulated backend with a `LengthSource` that generates (`lengths.py`) and a `Learner` that
learns (`systems/learning`).
"""
