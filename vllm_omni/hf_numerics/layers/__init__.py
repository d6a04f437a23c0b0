# SPDX-License-Identifier: Apache-2.0
"""vLLM layers whose forward is the mode's ops; parameters, names and weight loading stay vLLM's."""
