"""The local web app: composes, shows and controls runs through the files and checks that the commands use."""
