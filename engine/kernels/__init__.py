"""The operations a model is made of: plain-torch reference and one implementation per device."""
