# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics matrix``: one row for each way to run an engine, each exact, refused by name, or reported."""
