-- PostgreSQL runs this once, when its volume is empty.
CREATE DATABASE prefect OWNER holdfast;
