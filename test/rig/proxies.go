package rig

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Proxies is HAProxy and nginx of Debian, in the folder where `make proxies` has unpacked them.
type Proxies string

// FindProxies returns the folder for the repository at root. It fails if `make proxies` has not run.
func FindProxies(root string) (Proxies, error) {
	folder, err := filepath.Abs(filepath.Join(root, "bin/proxies"))
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(folder, "stamp")); err != nil {
		return "", fmt.Errorf("needs HAProxy and nginx: make proxies: %w", err)
	}
	return Proxies(folder), nil
}

// Command returns the arguments for env(1) that run a program of the folder in the folder dir.
func (p Proxies) Command(program, dir string) (args []string, err error) {
	libraries, err := filepath.Glob(filepath.Join(string(p), "usr/lib/*-linux-gnu"))
	if err != nil {
		return nil, err
	}
	return []string{
		"-C", dir, "LD_LIBRARY_PATH=" + strings.Join(libraries, ":"), filepath.Join(string(p), "usr/sbin", program),
	}, nil
}

// NginxStream returns the path of nginx's module for TCP.
func (p Proxies) NginxStream() string {
	return filepath.Join(string(p), "usr/lib/nginx/modules/ngx_stream_module.so")
}
