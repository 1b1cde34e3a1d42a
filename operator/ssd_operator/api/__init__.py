"""The SSDDeployment: its typed form, its schema, its validation."""
