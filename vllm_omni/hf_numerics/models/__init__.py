# SPDX-License-Identifier: Apache-2.0
"""One file a model: which layer replaces which."""
