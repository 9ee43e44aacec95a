"""Naju models for Hugging Face's transformers; importing this registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from naju.hf.cache import NajuCache
from naju.hf.configuration_naju import NajuConfig
from naju.hf.modeling_naju import NajuForCausalLM, NajuForSequenceClassification, NajuModel

AutoConfig.register(NajuConfig.model_type, NajuConfig, exist_ok=True)
AutoModel.register(NajuConfig, NajuModel, exist_ok=True)
AutoModelForCausalLM.register(NajuConfig, NajuForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(NajuConfig, NajuForSequenceClassification, exist_ok=True)

__all__ = ["NajuCache", "NajuConfig", "NajuForCausalLM", "NajuForSequenceClassification", "NajuModel"]
