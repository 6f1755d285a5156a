//go:build !linux

package check

import (
	"errors"
	"net/netip"
)

// masqueraded fails: only Linux has nftables.
func masqueraded([]netip.Prefix) ([]netip.Prefix, error) { return nil, errors.ErrUnsupported }

// redirected fails: only Linux has nftables.
func redirected() (redirects, error) { return redirects{}, errors.ErrUnsupported }

// writable returns nil: only edges on Linux keep a state of Services.
func writable(string) error { return nil }

// isLocked returns false: only edges on Linux keep a state of Services.
func isLocked(string) (bool, error) { return false, nil }
