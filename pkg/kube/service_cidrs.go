package kube

import (
	"context"
	"net/netip"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// This file reads the networks of Services, whose addresses no Node may claim.

const (
	// serviceCIDRsInterval is how often the networks of Services are read. They change only when
	// an administrator adds or removes one.
	serviceCIDRsInterval = time.Minute
	// serviceCIDRsRetry is how long to wait after a failure.
	serviceCIDRsRetry = 5 * time.Second

	serviceCIDRs = "/apis/networking.k8s.io/v1/servicecidrs"
)

// serviceCIDRList holds the fields of a ServiceCIDRList (k8s.io/api/networking/v1) that this package uses.
type serviceCIDRList struct {
	Items []struct {
		Spec struct {
			CIDRs []string `json:"cidrs"`
		} `json:"spec"`
	} `json:"items"`
}

// followServices keeps the networks of Services up to date until ctx is done.
func (r *Reaches) followServices(ctx context.Context) {
	for ctx.Err() == nil {
		var list serviceCIDRList
		err := r.client.objects.list(ctx, serviceCIDRs, "", &list)
		var all []netip.Prefix
		for _, item := range list.Items {
			for _, text := range item.Spec.CIDRs {
				if p, bad := netip.ParsePrefix(text); bad == nil {
					all = append(all, unmapped(p))
				}
			}
		}
		if ctx.Err() == nil {
			r.setServices(all, err)
		}
		pause := serviceCIDRsInterval
		if err != nil && !apierrors.IsNotFound(err) {
			pause = serviceCIDRsRetry
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// setServices stores the networks of Services, or the error why they cannot be read. If the right
// to read them is missing, or the cluster has no ServiceCIDRs (before Kubernetes 1.33), Reaches
// works without them.
func (r *Reaches) setServices(all []netip.Prefix, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed, before := !r.servicesKnown, r.errServices
	switch {
	case apierrors.IsNotFound(err):
		if changed {
			r.log.Info("this cluster has no ServiceCIDRs (Kubernetes 1.33 has): " +
				"a Node that claims the address of a Service cannot be noticed")
		}
		r.servicesKnown, r.errServices = true, nil
	case err != nil:
		r.errServices = err
		r.servicesKnown = r.servicesKnown || ReasonFor(err) == Forbidden
		if before == nil {
			r.log.Warn("the networks of Services cannot be read; a Node that claims the address of a Service may not be noticed",
				"err", Explain(err))
		}
	default:
		r.servicesKnown, r.errServices = true, nil
		if before != nil {
			r.log.Info("the networks of Services can be read again")
		}
		if !slices.Equal(all, r.services) {
			r.services, changed = all, true
		}
	}
	if changed && r.servicesKnown {
		(*reachStore)(r).notifyLocked()
	}
}
