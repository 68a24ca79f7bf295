"""Adapters: the field's environments and external trainers, spoken to in their own interfaces."""
