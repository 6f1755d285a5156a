//go:build !linux

package check

import (
	"errors"
	"net/netip"
)

// masqueraded would list rules of nftables.
func masqueraded([]netip.Prefix) ([]netip.Prefix, error) { return nil, errors.ErrUnsupported }

// redirected would list rules of nftables.
func redirected() (redirects, error) { return redirects{}, errors.ErrUnsupported }

// writable would ask the system: only Linux has a state of Services.
func writable(string) error { return nil }

// isLocked is as writable.
func isLocked(string) (bool, error) { return false, nil }
