# SPDX-License-Identifier: Apache-2.0
"""``hf-numerics tune``: find the fastest tiles of a device that change no bit, and write them as a table."""
