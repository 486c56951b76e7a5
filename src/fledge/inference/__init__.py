"""The InferenceEngine: token ids in, token ids and log-probs out, from the very module that is
trained.
"""

from fledge.inference.engine import NativeEngine

__all__ = ["NativeEngine"]
