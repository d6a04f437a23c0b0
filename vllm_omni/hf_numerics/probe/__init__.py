# SPDX-License-Identifier: Apache-2.0
"""The probe: proves bitwise equality and shows where it ends. Command line: ``hf-numerics``."""
