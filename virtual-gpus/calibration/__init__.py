"""The clock's published figures, and the programs that fit it to one half of them and hold it against the other.

From the folder above: `python -m calibration.clock_fit`, `python -m calibration.clock_validation`, and so on. They need
numpy and torchvision, and what fits needs scipy. The validations write to `recorded`. A record names the command as it
was at its commit; these programs were `experiments.NAME` until November 2026.
"""
